"""What people see: pages, progress on the console, timelines in the terminal."""
