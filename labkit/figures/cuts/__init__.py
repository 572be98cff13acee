"""Models cut across ranks: what each rank keeps, does and sends."""
