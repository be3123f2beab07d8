"""What real nodes carry: Arrow tables, and the kernels that make tables of tables."""
