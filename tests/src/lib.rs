//! End-to-end tests, their harness and the demo: real cluster, real clients, real models.
