"""Launch configurations: which one a kernel runs with."""
