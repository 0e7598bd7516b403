"""What tests of code that uses streamloader, or of a store for it, are made of. Public; needs no test framework.

`clock.py` is a clock that tests move, `order.py` computes the order of samples without the loader's code.
"""
