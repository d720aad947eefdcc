"""`kvmem calibrate`: which query heads of a model find text, measured on texts that every machine has."""
