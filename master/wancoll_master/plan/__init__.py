"""What the master measures of links and decides from it: pure, and apart from membership."""
