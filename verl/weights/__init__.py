"""Moving weights from the trainer to the engines: parcels of bytes, the transports that carry them, the publisher that
gives every engine the same version, and the probe that proves it arrived. Knows neither models nor engines: it is
handed iterators of (name, tensor) and objects that can load and score. Imported by training, rollout and all above."""
