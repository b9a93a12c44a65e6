"""What our figures are divided by: the same bytes by other means, each module one of them."""
