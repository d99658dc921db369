"""The RL loop and its stages: the step (`loop`), what feeds it (`buffer`), validation (`evaluate`), and the one place
that turns settings into objects (`build`). Knows no Ray and no torch; imported by demo and cli."""
