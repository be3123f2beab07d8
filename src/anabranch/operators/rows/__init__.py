"""Rows as Arrow tables: their schema, keys, times, and those that an operator cannot take."""
