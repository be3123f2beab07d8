"""What a node decides: what is complete, which epoch counts, what is installed, rebuilt, reported.

Written once, over the protocols of `carried.py`: it never looks into rows, state or files. Real
nodes carry Arrow tables (`node/arrow`) in a process (`node/process`), simulated ones small numbers.
"""
