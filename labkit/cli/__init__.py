"""The `labkit` command line, and the code that only its commands use."""
