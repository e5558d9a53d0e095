//! Transfers activations between pipeline stages on different devices, through the host.

use windlass_kernels::cuda::{Device, DriverError, Pinned, Stream, View, ViewMut};

/// A host buffer for the activations of the largest step, reused by every step.
#[derive(Debug)]
pub(super) struct ActivationBuffer(Pinned<f32>);

impl ActivationBuffer {
    /// Allocates the buffer for steps of up to `tokens` tokens.
    pub fn new(device: &Device, tokens: usize, hidden: usize) -> Result<ActivationBuffer, DriverError> {
        Ok(ActivationBuffer(device.pinned(tokens * hidden)?))
    }

    /// Bytes of the buffer.
    pub fn bytes(tokens: usize, hidden: usize) -> u64 {
        (4 * tokens * hidden) as u64
    }

    /// Copies activations to the residual stream. Padding rows become zeros: otherwise their old values would go
    /// through the layers again in every step, and grow.
    pub fn upload(&self, activations: &[f32], residual: ViewMut<'_, f32>, stream: &Stream) -> Result<(), DriverError> {
        let padding = vec![0.0; residual.len() - activations.len()];
        self.0.write(0, activations);
        self.0.write(activations.len(), &padding);
        stream.copy_to_device(residual, &self.0, 0)
    }

    /// The residual stream, after all issued work.
    pub fn fetch(&self, residual: View<'_, f32>, stream: &Stream) -> Result<Vec<f32>, DriverError> {
        stream.copy_to_host(&self.0, 0, residual)?;
        stream.synchronize()?;
        Ok(self.0.read(0..residual.len()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

    use windlass_cuda_shim::{HostMachine, Kernels};

    use super::*;

    #[test]
    fn rows_that_only_pad_a_step_are_zeros_whatever_they_were() {
        let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 20);
        let (activation_buffer, stream) = (ActivationBuffer::new(&device, 3, 2).unwrap(), device.stream().unwrap());
        let mut residual = device.upload(&[f32::NAN; 6]).unwrap();
        activation_buffer.upload(&[9.0; 4], residual.slice_mut(0..4), &stream).unwrap();
        stream.synchronize().unwrap();
        activation_buffer.upload(&[1.0, 2.0], residual.slice_mut(0..4), &stream).unwrap();
        let found = residual.read(&stream).unwrap();
        assert_eq!(found[..4], [1.0, 2.0, 0.0, 0.0]);
        assert!(found[4..].iter().all(|value| value.is_nan()), "the step has no such rows: {found:?}");
    }
}
