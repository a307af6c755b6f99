"""What `make docs` generates: the API reference and the executed tutorials."""
