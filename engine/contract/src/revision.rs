//! Revisions of a model's source.

/// Whether a revision can never mean other files: a commit, as Git names one in SHA-1.
pub fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_has_forty_hexadecimal_digits() {
        let commit = "0123456789abcdef0123456789ABCDEF01234567";
        assert!(is_commit(commit));
        for other in ["main", &commit[1..], &format!("{commit}8"), &commit.replace('a', "g"), &"ä".repeat(20)] {
            assert!(!is_commit(other), "{other}");
        }
    }
}
