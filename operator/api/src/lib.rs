//! The InferenceService types, their defaults, rules and status; renders the CRD.
