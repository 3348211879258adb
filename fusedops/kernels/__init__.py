"""Device functions that several operator families share. Each module here imports Triton: import them lazily."""
