use std::sync::mpsc;
use std::thread;

use half::bf16;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::cuda::Device;
use windlass_kernels::cuda::ops::PeerRank;

use crate::common::{Random, poisoned};

/// Sums that follow one another on the same buffers.
const ROUNDS: usize = 12;

/// What each rank ends with, and what it should. Each has a device and a thread; in every round another one lets the others
/// go first.
fn sums(ranks: usize, values: usize, seed: u64) -> (Vec<Vec<f32>>, Vec<f32>) {
    let machine = HostMachine::new(Kernels::Run, seed);
    let devices: Vec<Device> = (0..ranks).map(|ordinal| machine.device(ordinal, 1 << 24)).collect();
    let mut random = Random::new(seed);
    let parts: Vec<Vec<Vec<bf16>>> =
        (0..ROUNDS).map(|_| (0..ranks).map(|_| random.halves(values, 3.0)).collect()).collect();
    let mut expected = vec![1.0_f32; values];
    for parts in &parts {
        for (i, expected) in expected.iter_mut().enumerate() {
            *expected += parts.iter().fold(0.0, |sum, part| sum + part[i].to_f32());
        }
    }
    let group = PeerRank::group(&devices, values + 8).unwrap();
    let found = thread::scope(|scope| {
        let (done, ended) = mpsc::channel();
        let run = |(rank, mut member): (usize, PeerRank)| {
            let (device, parts, done) = (devices[rank].clone(), &parts, done.clone());
            scope.spawn(move || {
                let stream = device.stream().unwrap();
                let mut residual = poisoned::<f32>(&device, values);
                stream.copy(residual.view_mut(), device.upload(&vec![1.0_f32; values]).unwrap().view()).unwrap();
                for (round, parts) in parts.iter().enumerate() {
                    if round % ranks == rank {
                        thread::yield_now();
                    }
                    let part = device.upload(&parts[rank]).unwrap();
                    stream.copy(member.part(values), part.view()).unwrap();
                    member.add_reduced(&stream, residual.view_mut()).unwrap();
                    stream.synchronize().unwrap();
                }
                let found = residual.read(&stream).unwrap();
                done.send(()).unwrap();
                (member, found)
            })
        };
        let threads: Vec<_> = group.into_iter().enumerate().map(run).collect();
        drop(done);
        // Nobody's memory goes away while another still reads it.
        (0..ranks).for_each(|_| ended.recv().unwrap());
        threads.into_iter().map(|thread| thread.join().unwrap().1).collect()
    });
    (found, expected)
}

#[test]
fn ranks_add_up_what_all_of_them_hold_round_after_round() {
    for (seed, (ranks, values)) in [(1, 8), (2, 8), (2, 4104), (3, 2048), (4, 80_000)].into_iter().enumerate() {
        let (found, expected) = sums(ranks, values, 40 + seed as u64);
        for (rank, found) in found.iter().enumerate() {
            assert!(*found == expected, "rank {rank} of {ranks}, {values} values");
        }
    }
}
