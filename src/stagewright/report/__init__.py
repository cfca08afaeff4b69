"""What people see: progress on the console, timelines in the terminal."""
