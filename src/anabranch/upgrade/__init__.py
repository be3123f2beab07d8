"""May this topology go on from that checkpoint? What is written of it, and what is compared."""
