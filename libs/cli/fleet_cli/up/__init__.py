"""`fleet up`: a whole fleet on this machine, under one supervisor."""
