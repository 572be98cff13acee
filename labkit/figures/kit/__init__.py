"""What every figure is made of: a canvas, panels, axes, and how runs are called and coloured."""
