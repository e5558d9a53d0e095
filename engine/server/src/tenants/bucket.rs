//! A token bucket that may go into debt: what an answer will cost is known only when it is there.

/// Tokens that may be used now, refilled at an even rate.
#[derive(Debug)]
pub struct Bucket {
    tokens: f64,
    seconds: f64,
}

impl Bucket {
    /// A bucket that is full at `now`: it holds a minute's tokens.
    pub fn full(tokens_per_minute: u64, now: f64) -> Bucket {
        Bucket { tokens: tokens_per_minute as f64, seconds: now }
    }

    /// Takes off what was used.
    pub fn spend(&mut self, tokens: u64) {
        self.tokens -= tokens as f64;
    }

    /// Whether anything is left at `now`; otherwise the seconds until something is.
    pub fn check(&mut self, tokens_per_minute: u64, now: f64) -> Result<(), f64> {
        let per_second = tokens_per_minute as f64 / 60.0;
        let refilled = self.tokens + (now - self.seconds).max(0.0) * per_second;
        self.tokens = refilled.min(tokens_per_minute as f64);
        self.seconds = now;
        if self.tokens >= 1.0 { Ok(()) } else { Err((1.0 - self.tokens) / per_second) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minutes_tokens_may_be_used_at_once_and_debt_is_waited_for() {
        let mut bucket = Bucket::full(60, 0.0);
        assert_eq!(bucket.check(60, 0.0), Ok(()));
        bucket.spend(89);
        assert_eq!(bucket.check(60, 0.0), Err(30.0));
        assert_eq!(bucket.check(60, 20.0), Err(10.0));
        assert_eq!(bucket.check(60, 30.0), Ok(()));
        // It never holds more than a minute's.
        assert_eq!(bucket.check(60, 10_000.0), Ok(()));
        bucket.spend(60);
        assert_eq!(bucket.check(60, 10_000.0), Err(1.0));
    }
}
