//! Collectives of CPU ranks: buffers that all ranks read, and a barrier.
//!
//! Sums are computed in the order of ranks on every rank, so all ranks get the same bits, whichever came first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use windlass_kernels::{Pool, ops};

/// How long a rank spins before it sleeps: longer than ranks usually differ, shorter than a time slice.
const SPIN: Duration = Duration::from_micros(50);

/// One rank of a group.
#[derive(Debug)]
pub(crate) struct Member {
    rank: usize,
    group: Arc<Group>,
    /// Index of the set of buffers to write next: the other set may still be read.
    buffer: usize,
}

#[derive(Debug)]
struct Group {
    barrier: Barrier,
    /// Two sets of buffers, one for each rank.
    buffers: [Vec<RwLock<Vec<f32>>>; 2],
}

impl Member {
    /// Makes the members of a group of `ranks`.
    pub fn group(ranks: usize) -> Vec<Member> {
        let buffers = || (0..ranks).map(|_| RwLock::default()).collect();
        let group = Arc::new(Group { barrier: Barrier::new(ranks), buffers: [buffers(), buffers()] });
        (0..ranks).map(|rank| Member { rank, group: Arc::clone(&group), buffer: 0 }).collect()
    }

    /// Replaces `values` by their sum over all ranks, which have equally many.
    ///
    /// # Panics
    /// If another rank has failed.
    pub fn all_reduce(&mut self, pool: &Pool, values: &mut [f32]) {
        if self.is_alone() {
            return;
        }
        let parts = self.exchange(values);
        values.copy_from_slice(&parts[0]);
        parts[1..].iter().for_each(|part| ops::add(pool, values, part));
    }

    /// Gathers the columns of all ranks in `values` of the first rank: its `rows` rows of own columns become complete
    /// rows.
    ///
    /// # Panics
    /// If another rank has failed.
    pub fn gather_columns(&mut self, rows: usize, own_columns: usize, values: &mut [f32]) {
        if self.is_alone() {
            return;
        }
        let first = self.rank == 0;
        let parts = self.exchange(&values[..rows * own_columns]);
        if first {
            let widths: Vec<usize> = parts.iter().map(|part| part.len() / rows).collect();
            for (row, mut whole) in values.chunks_exact_mut(widths.iter().sum()).take(rows).enumerate() {
                for (part, &width) in parts.iter().zip(&widths) {
                    let columns = whole.split_off_mut(..width).unwrap_or_default();
                    columns.copy_from_slice(&part[row * width..][..width]);
                }
            }
        }
    }

    /// Makes the other ranks stop waiting for this one.
    pub fn leave(&self, why: &str) {
        self.group.barrier.fail(format!("rank {} of {} has left: {why}", self.rank, self.group.barrier.ranks));
    }

    fn is_alone(&self) -> bool {
        self.group.barrier.ranks == 1
    }

    /// Publishes `own`, waits for all ranks, and returns what they published.
    fn exchange(&mut self, own: &[f32]) -> Vec<RwLockReadGuard<'_, Vec<f32>>> {
        let buffers = &self.group.buffers[self.buffer];
        self.buffer = 1 - self.buffer;
        let mut own_buffer = buffers[self.rank].write().unwrap_or_else(PoisonError::into_inner);
        own_buffer.clear();
        own_buffer.extend_from_slice(own);
        drop(own_buffer);
        if let Err(why) = self.group.barrier.wait() {
            panic!("{why}");
        }
        buffers.iter().map(|own_buffer| own_buffer.read().unwrap_or_else(PoisonError::into_inner)).collect()
    }
}

/// A barrier: nobody passes until all ranks have come, or one has failed.
#[derive(Debug)]
struct Barrier {
    ranks: usize,
    state: Mutex<Waiting>,
    changed: Condvar,
    /// How many times all ranks have come.
    round: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    arrived: usize,
    failed: Option<String>,
}

impl Barrier {
    fn new(ranks: usize) -> Barrier {
        Barrier { ranks, state: Mutex::default(), changed: Condvar::new(), round: AtomicU64::new(0) }
    }

    fn wait(&self) -> Result<(), String> {
        // It cannot end before this rank has come.
        let round = self.round.load(Ordering::Acquire);
        let over = || self.round.load(Ordering::Acquire) != round;
        if self.arrive()? {
            return Ok(());
        }
        let started = Instant::now();
        while started.elapsed() < SPIN {
            for _ in 0..64 {
                if over() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        let mut state = self.state();
        while !over() {
            if let Some(why) = &state.failed {
                return Err(why.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Whether all ranks have come.
    fn arrive(&self) -> Result<bool, String> {
        let mut state = self.state();
        if let Some(why) = &state.failed {
            return Err(why.clone());
        }
        state.arrived += 1;
        let all = state.arrived == self.ranks;
        if all {
            state.arrived = 0;
            self.round.fetch_add(1, Ordering::Release);
            self.changed.notify_all();
        }
        Ok(all)
    }

    fn fail(&self, why: String) {
        self.state().failed.get_or_insert(why);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// The values of each rank after `task`.
    fn on_ranks<T: Send>(ranks: usize, task: impl Fn(usize, &mut Member) -> T + Sync) -> Vec<T> {
        let task = &task;
        thread::scope(|scope| {
            let spawn = |(rank, mut member)| scope.spawn(move || task(rank, &mut member));
            let threads: Vec<_> = Member::group(ranks).into_iter().enumerate().map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_same_sum_however_often() {
        let sums = on_ranks(3, |rank, member| {
            let pool = Pool::new(1).unwrap();
            let mut sums = Vec::new();
            for round in 0..500 {
                // Sums of these depend on their order.
                let mut values = vec![[1e8, 1.0, -1e8][rank] + round as f32; 5];
                member.all_reduce(&pool, &mut values);
                sums.push(values);
            }
            sums
        });
        for (round, sum) in sums[0].iter().enumerate() {
            let round = round as f32;
            assert_eq!(sum, &vec![(1e8 + round) + (1.0 + round) + (-1e8 + round); 5]);
        }
        assert!(sums[1] == sums[0] && sums[2] == sums[0]);
    }

    #[test]
    fn columns_of_different_widths_become_whole_rows_on_the_first_rank() {
        let gathered = on_ranks(3, |rank, member| {
            let width = rank + 1;
            let mut values = vec![-1.0; 2 * 6];
            for row in 0..2 {
                values[row * width..][..width].fill((10 * row + rank) as f32);
            }
            member.gather_columns(2, width, &mut values);
            values
        });
        assert_eq!(gathered[0], [0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 10.0, 11.0, 11.0, 12.0, 12.0, 12.0]);
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_left() {
        let outcomes = on_ranks(3, |rank, member| match rank {
            1 => {
                member.leave("it broke");
                Ok(())
            }
            _ => member.group.barrier.wait(),
        });
        for rank in [0, 2] {
            assert_eq!(outcomes[rank], Err("rank 1 of 3 has left: it broke".to_owned()));
        }
    }

    #[test]
    fn alone_nothing_changes() {
        let mut values = [3.0];
        let mut member = Member::group(1).remove(0);
        member.all_reduce(&Pool::new(1).unwrap(), &mut values);
        member.gather_columns(1, 1, &mut values);
        assert_eq!(values, [3.0]);
    }
}
