"""What real nodes run in: a process with its socket, threads and heartbeat."""
