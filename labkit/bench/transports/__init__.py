"""One exchange, five ways: what carries an array from one process to another, and what it costs."""
