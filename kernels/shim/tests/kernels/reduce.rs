//! What ranks exchange: each has a device and a thread.

use std::thread;

use half::bf16;
use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::cuda::ops::{ExchangeSizes, PeerRank};
use windlass_kernels::cuda::{Device, Stream};

use crate::common::{Random, poisoned};

/// Rounds that follow one another on the same buffers, by turns of four kinds.
const ROUNDS: usize = 12;
const ROWS: usize = 3;

/// What a rank does with its place in a group.
fn on_ranks<T: Send>(
    ranks: usize,
    sizes: &ExchangeSizes,
    seed: u64,
    task: impl Fn(usize, &Device, &Stream, &mut PeerRank) -> T + Sync,
) -> Vec<T> {
    let machine = HostMachine::new(Kernels::Run, seed);
    let devices: Vec<Device> = (0..ranks).map(|ordinal| machine.device(ordinal, 1 << 24)).collect();
    let group = PeerRank::group(&devices, sizes).unwrap();
    let (task, devices) = (&task, &devices);
    thread::scope(|scope| {
        let run = |(rank, mut member): (usize, PeerRank)| {
            scope.spawn(move || {
                let found = task(rank, &devices[rank], &devices[rank].stream().unwrap(), &mut member);
                (member, found)
            })
        };
        let threads: Vec<_> = group.into_iter().enumerate().map(run).collect();
        // Nobody's memory goes away while another still reads it.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(_, found)| found).collect()
    })
}

/// What each rank finds after every round, in f32, and what it should find.
fn exchanged(widths: &[usize], values: usize, seed: u64) -> (Vec<Vec<Vec<f32>>>, Vec<Vec<f32>>) {
    let ranks = widths.len();
    let sizes = ExchangeSizes { tokens: 1, hidden: values + 8, rows: ROWS, columns: widths.to_vec() };
    let mut random = Random::new(seed);
    let parts: Vec<Vec<Vec<bf16>>> =
        (0..ROUNDS).map(|_| (0..ranks).map(|_| random.halves(values.max(ROWS * 700), 3.0)).collect()).collect();
    let floats = |part: &[bf16]| part.iter().map(|value| value.to_f32() / 3.0).collect::<Vec<f32>>();
    let mut residual = vec![1.0_f32; values];
    let mut expected = Vec::new();
    for (round, parts) in parts.iter().enumerate() {
        let sum = |part: &dyn Fn(usize) -> Vec<f32>| -> Vec<f32> {
            let parts: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            (0..values).map(|i| parts.iter().fold(0.0, |sum, part| sum + part[i])).collect()
        };
        let halves = sum(&|rank| parts[rank].iter().map(|value| value.to_f32()).collect());
        expected.push(match round % 4 {
            0 => sum(&|rank| floats(&parts[rank])),
            1 => {
                residual.iter_mut().zip(halves).for_each(|(held, sum)| *held += sum);
                residual.clone()
            }
            2 => halves.into_iter().map(|sum| bf16::from_f32(sum).to_f32()).collect(),
            _ => (0..ROWS)
                .flat_map(|row| {
                    let columns = parts.iter().zip(widths).map(move |(part, &width)| &part[row * width..][..width]);
                    columns.flatten().map(|value| value.to_f32() / 3.0)
                })
                .collect(),
        });
    }
    let found = on_ranks(ranks, &sizes, seed, |rank, device, stream, member| {
        let mut residual = poisoned::<f32>(device, values);
        stream.copy(residual.view_mut(), device.upload(&vec![1.0_f32; values]).unwrap().view()).unwrap();
        let mut found = Vec::new();
        for (round, parts) in parts.iter().enumerate() {
            // In every round another one lets the others go first.
            if round % ranks == rank {
                thread::yield_now();
            }
            let (own, floats) = (&parts[rank], floats(&parts[rank]));
            found.push(match round % 4 {
                0 => {
                    let mut out = poisoned::<f32>(device, values);
                    let part = device.upload(&floats[..values]).unwrap();
                    stream.copy(member.floats(values), part.view()).unwrap();
                    member.reduce_floats(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap()
                }
                1 => {
                    stream.copy(member.part(values), device.upload(&own[..values]).unwrap().view()).unwrap();
                    member.add_reduced(stream, residual.view_mut()).unwrap();
                    residual.read(stream).unwrap()
                }
                2 => {
                    let mut out = poisoned::<bf16>(device, values);
                    stream.copy(member.part(values), device.upload(&own[..values]).unwrap().view()).unwrap();
                    member.reduce(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap().iter().map(|value| value.to_f32()).collect()
                }
                _ => {
                    let mut out = poisoned::<f32>(device, ROWS * widths.iter().sum::<usize>());
                    let part = device.upload(&floats[..ROWS * widths[rank]]).unwrap();
                    stream.copy(member.columns(ROWS), part.view()).unwrap();
                    member.gather_columns(stream, out.view_mut()).unwrap();
                    out.read(stream).unwrap()
                }
            });
        }
        found
    });
    (found, expected)
}

#[test]
fn ranks_put_together_what_all_of_them_hold_round_after_round() {
    let cases: [(&[usize], usize); 5] =
        [(&[5], 8), (&[3, 2], 8), (&[161, 162], 4104), (&[1, 700, 40], 2048), (&[9, 9, 9, 9], 80_000)];
    for (seed, (widths, values)) in cases.into_iter().enumerate() {
        let (found, expected) = exchanged(widths, values, 40 + seed as u64);
        for (rank, found) in found.iter().enumerate() {
            for (round, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found == expected, "rank {rank} of {}, {values} values, round {round}", widths.len());
            }
        }
    }
}

#[test]
fn nobody_waits_for_a_rank_that_has_left() {
    let sizes = ExchangeSizes { tokens: 1, hidden: 8, rows: 1, columns: vec![8; 3] };
    let found = on_ranks(3, &sizes, 5, |rank, device, stream, member| {
        if rank == 1 {
            member.peers().leave(1, "it has broken down");
            member.peers().leave(1, "and again");
            return member.peers().why_left();
        }
        let mut residual = device.upload(&[0.0_f32; 8]).unwrap();
        (0..4).for_each(|_| member.add_reduced(stream, residual.view_mut()).unwrap());
        stream.synchronize().unwrap();
        member.peers().why_left()
    });
    assert_eq!(found, vec![Some("rank 1 of 3 has left: it has broken down".to_owned()); 3]);
}
