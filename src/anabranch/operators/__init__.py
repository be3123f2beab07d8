"""Arrow kernels: what an operator does with one slice, and the keyed state it keeps."""
