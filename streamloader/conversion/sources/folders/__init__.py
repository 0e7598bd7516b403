"""Files in folders, kept as they are: images, audio clips, COCO."""
