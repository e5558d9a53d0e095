//! Tasks led side by side, for those that mostly wait: each lane takes the next one from a common queue.

use anyhow::{Result, ensure};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::progress::Tally;

/// Does `lead` for each of the named `tasks` in one of `lanes`, whatever became of others.
///
/// # Errors
/// Everything that went wrong, each with the name of its task.
pub fn each<L: Sync, T: Sync>(
    lanes: &[L],
    tasks: &[(String, T)],
    lead: impl Fn(&L, &T) -> Result<()> + Sync,
) -> Result<()> {
    let (next, tally, wrong) = (AtomicUsize::new(0), Tally::new(tasks.len()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for lane in lanes {
            scope.spawn(|| {
                while let Some((name, task)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let error = tally.one(name, || lead(lane, task)).err();
                    let mut wrong = wrong.lock().unwrap_or_else(PoisonError::into_inner);
                    wrong.extend(error.map(|error| format!("{name}: {error:#}")));
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(wrong.is_empty(), "{} of {}:\n\n{}", wrong.len(), tasks.len(), wrong.join("\n\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::{self, Look};
    use std::time::Duration;

    #[test]
    fn lanes_run_side_by_side_and_one_failure_stops_none() {
        let tasks: Vec<(String, usize)> = (0..9).map(|number| (format!("task {number}"), number)).collect();
        let begun = AtomicUsize::new(0);
        let outcome = each(&[(), (), ()], &tasks, |(), number| {
            begun.fetch_add(1, Ordering::Relaxed);
            wait::until("three have begun", Duration::from_secs(10), || {
                let begun = begun.load(Ordering::Relaxed);
                Ok(Look::when(begun >= 3, (), format!("{begun}")))
            })?;
            ensure!(number % 4 != 3, "a fourth");
            Ok(())
        });
        assert_eq!(begun.into_inner(), tasks.len());
        let error = outcome.expect_err("two have failed").to_string();
        assert!(error.starts_with("2 of 9:"), "{error}");
        assert!(error.contains("task 3: a fourth") && error.contains("task 7: a fourth"), "{error}");
    }
}
