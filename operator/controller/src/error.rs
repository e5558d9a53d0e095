//! Why a reconcile did not come to its end, and the stable word that metrics and logs know it by.

use crate::children::WatchEnded;
use std::time::Duration;
use windlass_operator_core::status::Outcome;

/// Too many requests.
const THROTTLED: u16 = 429;

/// Failures of a reconcile: each is counted, and tried again ever more seldom. What the API server answers is told in
/// `status` besides.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request was refused or not answered.
    #[error("{attempt}: {source}")]
    Api {
        /// What was attempted.
        attempt: String,
        /// The client's error.
        #[source]
        source: kube::Error,
    },
    /// The watches have ended: the program is stopping.
    #[error(transparent)]
    Watches(#[from] WatchEnded),
    /// It took too long; what was done is done, the rest is tried again.
    #[error("not done after {0:?}")]
    Timeout(Duration),
    /// A defect: contained, so that it cannot stop the other services.
    #[error("panicked: {0}")]
    Panicked(String),
}

impl Error {
    /// Names the attempt that ended with a client's error.
    pub fn attempting(attempt: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
        let attempt = attempt.into();
        move |source| Error::Api { attempt, source }
    }

    /// How the plan ended, where a server has said so. One that asks for fewer requests is not sent a status either.
    pub fn outcome(&self) -> Option<Outcome> {
        match self {
            Error::Api { attempt, source: kube::Error::Api(status) } if status.code != THROTTLED => {
                Some(Outcome::Failed { attempt: attempt.clone(), message: status.message.clone() })
            }
            _ => None,
        }
    }

    /// Whether the namespace is being deleted: nothing can be made in it any more, and what is there goes with it.
    pub fn is_of_ending_namespace(&self) -> bool {
        let Error::Api { source: kube::Error::Api(status), .. } = self else { return false };
        let mut causes = status.details.iter().flat_map(|details| &details.causes);
        status.code == 403 && causes.any(|cause| cause.reason == "NamespaceTerminating")
    }

    /// A stable word for metrics.
    pub fn category(&self) -> &'static str {
        match self {
            Error::Api { source: kube::Error::Api(status), .. } => match status.code {
                401 | 403 => "forbidden",
                404 => "not_found",
                409 => "conflict",
                THROTTLED => "throttled",
                400..500 => "invalid",
                _ => "server",
            },
            Error::Api { .. } => "transport",
            Error::Watches(_) => "stopping",
            Error::Timeout(_) => "timeout",
            Error::Panicked(_) => "panic",
        }
    }
}

/// An error with its causes, each once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_already_quoted_is_not_repeated() {
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "refused");
        let error = Error::Api {
            attempt: "list pods".into(),
            source: kube::Error::Service(Box::new(std::io::Error::other(refused))),
        };
        assert_eq!(chain(&error).matches("refused").count(), 1, "{}", chain(&error));
        assert_eq!(error.category(), "transport");
    }

    #[test]
    fn an_answer_is_told_and_counted_by_what_it_says() {
        for (code, category, is_told) in [
            (403, "forbidden", true),
            (409, "conflict", true),
            (422, "invalid", true),
            (429, "throttled", false),
            (500, "server", true),
            (503, "server", true),
        ] {
            let status = kube::core::Status { code, message: "m".into(), ..kube::core::Status::default() };
            let source = kube::Error::Api(Box::new(status));
            let error = Error::Api { attempt: "a".into(), source };
            let told = Outcome::Failed { attempt: "a".into(), message: "m".into() };
            assert_eq!((error.category(), error.outcome()), (category, is_told.then_some(told)), "{code}");
        }
    }
}
