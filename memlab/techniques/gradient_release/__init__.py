"""Updates inside the backward pass: `gradient_release` is the technique, `watch` sees what the loop does with gradients."""
