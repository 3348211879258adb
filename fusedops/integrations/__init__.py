"""fusedops inside other libraries. Each module here imports the library that it is named after; nothing else does."""
