//! Absence of instances. The credentials of another account find no instance, so "not found" counts
//! only if EC2 also shows the subnets of the cells, or the node if no subnets are configured.

use crate::provider::{Ec2, ErrorClass, ProviderError};

impl Ec2 {
    /// Returns the error of a call that names an instance. "Not found" becomes an error that proves
    /// nothing unless EC2 shows the subnets.
    pub(super) async fn as_evidence(&self, error: ProviderError) -> ProviderError {
        if error.class != ErrorClass::NotFound {
            return error;
        }
        let unproven = format!(
            "{}: not found, which proves no end, as EC2 does not show the subnets of the cells \
             either; the credentials may be those of another account",
            error.doing
        );
        match self.described_subnets().await {
            Ok((_, described)) if !described.is_empty() => error,
            Ok(_) => ProviderError::without_cause(ErrorClass::Transient, unproven),
            Err(cause) => ProviderError::transient(unproven, cause),
        }
    }
}
