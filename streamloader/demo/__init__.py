"""The main job from end to end on one machine, with nothing faked: `streamloader demo`."""
