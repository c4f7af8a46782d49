"""The parts that models are made of: one idea a file."""
