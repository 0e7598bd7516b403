"""What comes after a conversion: checking, adding to it, writing it out again, removing what is unfinished."""
