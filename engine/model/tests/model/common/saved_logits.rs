//! What `llama-perplexity --save-all-logits FILE` writes: windows of tokens, and log probabilities after those of each second
//! half, in 65,536 steps of the sixteen nats below the likeliest at most.

/// Windows of a text.
pub struct SavedLogits {
    /// In the order of the text.
    pub windows: Vec<Window>,
}

/// Tokens that were read together.
pub struct Window {
    /// All of them.
    pub tokens: Vec<u32>,
    /// The first after which there are log probabilities.
    pub first: usize,
    /// After that and each later one but the last.
    pub rows: Vec<Vec<f32>>,
}

impl SavedLogits {
    /// Reads a file's bytes.
    pub fn parse(bytes: &[u8]) -> Result<SavedLogits, String> {
        let mut rest = Rest(bytes);
        if rest.take(8)? != b"_logits_" {
            return Err("it does not begin with _logits_".to_owned());
        }
        let [length, vocabulary, count] = [rest.number()?, rest.number()?, rest.number()?].map(|size| size as usize);
        let tokens = (0..count).map(|_| (0..length).map(|_| rest.number()).collect::<Result<Vec<u32>, _>>());
        let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
        let first = length / 2;
        let windows = tokens.into_iter().map(|tokens| {
            let rows = (first + 1..length).map(|_| rest.row(vocabulary)).collect::<Result<_, String>>()?;
            Ok(Window { tokens, first, rows })
        });
        Ok(SavedLogits { windows: windows.collect::<Result<_, String>>()? })
    }
}

/// Bytes that were not read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("it ends too early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.take(4)?.as_chunks().0[0]))
    }

    /// A step, the least log probability, and how many steps each is above it; rows have an even number of them.
    fn row(&mut self, vocabulary: usize) -> Result<Vec<f32>, String> {
        let [step, least] = [self.number()?, self.number()?].map(f32::from_bits);
        let steps = self.take(2 * vocabulary.next_multiple_of(2))?.as_chunks().0;
        Ok(steps[..vocabulary].iter().map(|steps| least + step * f32::from(u16::from_le_bytes(*steps))).collect())
    }
}

/// The same logits around 0: a constant says nothing, and programs add different ones.
pub fn centred(logits: &[f32]) -> Vec<f32> {
    let mean = logits.iter().sum::<f32>() / logits.len() as f32;
    logits.iter().map(|logit| logit - mean).collect()
}
