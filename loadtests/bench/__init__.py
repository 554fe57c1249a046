"""Every figure the project claims, each beside what it is compared with, measured in one run."""
