"""`streamloader demo`: conversion, training, a kill and a resume, for real, on one machine."""
