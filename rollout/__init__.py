"""Episodes: sampling, generators, the episode loop, weight reception and the Ray shell."""
