"""Keyed state: tables by key that change in one step, and what is kept in them."""
