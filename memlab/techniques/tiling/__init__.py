"""Large linear layers in tiles: `tiling` is the technique, `feed_forward` finds the layers."""
