"""The `kvmem` command. Importing it loads neither the engine nor NumPy; commands do, when they run."""
