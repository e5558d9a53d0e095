//! Decides what an InferenceService becomes: plan, autoscaler, fit. Pure: no client, no clock.
