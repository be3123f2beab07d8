"""What `anabranch demo` runs."""
