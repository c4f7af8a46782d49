"""The layers that models are made of, one idea per file."""
