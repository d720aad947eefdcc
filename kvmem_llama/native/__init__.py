"""The cffi layer: loading the libraries that our build installs, the memory hooks, the kernels."""
