"""Everything of a dataset that iterates but torch: opening, passes, epochs, states."""
