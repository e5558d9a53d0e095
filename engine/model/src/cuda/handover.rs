//! Activations on their way from a stage that another device computes.

use windlass_kernels::cuda::{Device, DriverError, Pinned, Stream, ViewMut};

/// Room for them on the host: allocated once for the largest step, and written over by the next.
#[derive(Debug)]
pub(super) struct Handover(Pinned<f32>);

impl Handover {
    /// For steps of up to `tokens` tokens.
    pub fn new(device: &Device, tokens: usize, hidden: usize) -> Result<Handover, DriverError> {
        Ok(Handover(device.pinned(tokens * hidden)?))
    }

    /// Bytes of it.
    pub fn bytes(tokens: usize, hidden: usize) -> u64 {
        (4 * tokens * hidden) as u64
    }

    /// Copies activations to the residual stream. Rows that only pad the step become zeros: what they held goes through the
    /// layers again and again otherwise.
    pub fn bring(&self, activations: &[f32], residual: ViewMut<'_, f32>, stream: &Stream) -> Result<(), DriverError> {
        let padding = vec![0.0; residual.len() - activations.len()];
        self.0.write(0, activations);
        self.0.write(activations.len(), &padding);
        stream.copy_to_device(residual, &self.0, 0)
    }
}
