"""Every pair of features: the factors of a run, a covering array over them, and what each combination must hold."""
