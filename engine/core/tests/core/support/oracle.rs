//! A proposer that knows the answers, and errs as often as it is told to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use windlass_engine_core::draft::{DraftRequest, DraftTree, Proposer};
use windlass_engine_core::request::{RequestId, TokenId};

/// Proposes from known texts.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// One draft token in this many is wrong; 0 for none.
    pub errs_one_in: u64,
    /// Whether it also proposes a wrong token beside each.
    pub branches: bool,
    pub free: bool,
    pub texts: Arc<Mutex<HashMap<RequestId, Vec<TokenId>>>>,
}

impl Oracle {
    pub fn new(errs_one_in: u64) -> Oracle {
        Oracle { errs_one_in, branches: false, free: true, texts: Arc::default() }
    }

    /// Sets the text of a request: its prompt, then its answer.
    pub fn tell(&self, request: RequestId, text: Vec<TokenId>) {
        self.texts.lock().unwrap().insert(request, text);
    }

    /// Known requests that have not finished.
    pub fn remembered(&self) -> usize {
        self.texts.lock().unwrap().len()
    }

    fn draft(&self, request: &DraftRequest<'_>) -> DraftTree {
        let texts = self.texts.lock().unwrap();
        let (mut tree, mut parent) = (DraftTree::default(), None);
        let Some(text) = texts.get(&request.request) else { return tree };
        assert!(text.starts_with(request.tokens), "{:?} begins {:?}, not {text:?}", request.request, request.tokens);
        for (index, &token) in text.iter().enumerate().skip(request.tokens.len()) {
            if tree.len() + usize::from(self.branches) >= request.max_tokens {
                break;
            }
            if self.branches {
                tree.push(token + 1, parent);
            }
            let errs =
                self.errs_one_in > 0 && (index as u64 * 7919 + request.request.0).is_multiple_of(self.errs_one_in);
            parent = Some(tree.push(token + 2 * u32::from(errs), parent));
        }
        tree
    }
}

impl Proposer for Oracle {
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        requests.iter().map(|request| self.draft(request)).collect()
    }

    fn is_free(&self) -> bool {
        self.free
    }

    fn forget(&mut self, request: RequestId) {
        self.texts.lock().unwrap().remove(&request);
    }
}
