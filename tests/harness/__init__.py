"""What the tests share: the repaired interpreter, the error rule, awkward tensors, offline compilation."""
