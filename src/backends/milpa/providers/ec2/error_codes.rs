//! Error codes of EC2 and their classes.

use kiyot_ec2::{CallError, Failure};

use super::super::ErrorClass;

/// The offerings that an error refuses, of those of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// None.
    None,
    /// The requested offering.
    Offering,
    /// All offerings in the zone.
    Zone,
    /// All offerings of the market.
    Market,
}

/// The error codes by class. EC2's API reference describes them ("Error codes for the Amazon EC2
/// API"). An unknown code of a client's error is `Invalid`, and one of a server's error means that
/// the outcome is unknown.
#[rustfmt::skip]
const CODES: [(&str, ErrorClass, Refused); 79] = [
    ("InsufficientCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientHostCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientInstanceCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientReservedInstanceCapacity", ErrorClass::Capacity, Refused::Offering),
    ("SpotMaxPriceTooLow", ErrorClass::Capacity, Refused::Offering),
    ("UnfulfillableCapacity", ErrorClass::Capacity, Refused::Offering),
    ("Unsupported", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientFreeAddressesInSubnet", ErrorClass::Capacity, Refused::Zone),
    ("MaxSpotInstanceCountExceeded", ErrorClass::Capacity, Refused::Market),
    ("EC2ThrottledException", ErrorClass::Throttled, Refused::None),
    ("RequestLimitExceeded", ErrorClass::Throttled, Refused::None),
    ("RequestThrottled", ErrorClass::Throttled, Refused::None),
    ("RequestThrottledException", ErrorClass::Throttled, Refused::None),
    ("SlowDown", ErrorClass::Throttled, Refused::None),
    ("Throttling", ErrorClass::Throttled, Refused::None),
    ("ThrottlingException", ErrorClass::Throttled, Refused::None),
    ("TooManyRequestsException", ErrorClass::Throttled, Refused::None),
    ("InstanceLimitExceeded", ErrorClass::Quota, Refused::None),
    ("MaxIOPSLimitExceeded", ErrorClass::Quota, Refused::None),
    ("NetworkInterfaceLimitExceeded", ErrorClass::Quota, Refused::None),
    ("PendingVerification", ErrorClass::Quota, Refused::None),
    ("PrivateIpAddressLimitExceeded", ErrorClass::Quota, Refused::None),
    ("ResourceCountExceeded", ErrorClass::Quota, Refused::None),
    ("VcpuLimitExceeded", ErrorClass::Quota, Refused::None),
    ("VolumeLimitExceeded", ErrorClass::Quota, Refused::None),
    ("AccessDenied", ErrorClass::Auth, Refused::None),
    ("AccessDeniedException", ErrorClass::Auth, Refused::None),
    ("AuthFailure", ErrorClass::Auth, Refused::None),
    ("Blocked", ErrorClass::Auth, Refused::None),
    ("ExpiredToken", ErrorClass::Auth, Refused::None),
    ("ExpiredTokenException", ErrorClass::Auth, Refused::None),
    ("IncompleteSignature", ErrorClass::Auth, Refused::None),
    ("InvalidClientTokenId", ErrorClass::Auth, Refused::None),
    ("MissingAuthenticationToken", ErrorClass::Auth, Refused::None),
    ("OptInRequired", ErrorClass::Auth, Refused::None),
    ("RequestExpired", ErrorClass::Auth, Refused::None),
    ("SignatureDoesNotMatch", ErrorClass::Auth, Refused::None),
    ("UnauthorizedOperation", ErrorClass::Auth, Refused::None),
    ("UnrecognizedClientException", ErrorClass::Auth, Refused::None),
    ("IdempotentParameterMismatch", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.Unavailable", ErrorClass::Invalid, Refused::None),
    ("InvalidBlockDeviceMapping", ErrorClass::Invalid, Refused::None),
    ("InvalidGroup.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidIamInstanceProfileArn.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceID.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceType", ErrorClass::Invalid, Refused::None),
    ("InvalidInterface.IpAddressLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("InvalidKeyPair.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidParameter", ErrorClass::Invalid, Refused::None),
    ("InvalidParameterCombination", ErrorClass::Invalid, Refused::None),
    ("InvalidParameterValue", ErrorClass::Invalid, Refused::None),
    ("InvalidSecurityGroupID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidSnapshot.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidSubnet", ErrorClass::Invalid, Refused::None),
    ("InvalidSubnetID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidTagKey.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidUserData.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidVolume.ZoneMismatch", ErrorClass::Invalid, Refused::None),
    ("MissingParameter", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupsPerInstanceLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupsPerInterfaceLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("TagLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("UnknownParameter", ErrorClass::Invalid, Refused::None),
    ("UnsupportedOperation", ErrorClass::Invalid, Refused::None),
    ("VPCIdNotSpecified", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceID", ErrorClass::NotFound, Refused::None),
    ("InvalidInstanceID.NotFound", ErrorClass::NotFound, Refused::None),
    ("IdempotentInstanceTerminated", ErrorClass::Transient, Refused::None),
    ("IncorrectInstanceState", ErrorClass::Transient, Refused::None),
    ("PriorRequestNotComplete", ErrorClass::Transient, Refused::None),
    ("InternalError", ErrorClass::Unanswered, Refused::None),
    ("InternalFailure", ErrorClass::Unanswered, Refused::None),
    ("InternalServerError", ErrorClass::Unanswered, Refused::None),
    ("ServerInternal", ErrorClass::Unanswered, Refused::None),
    ("ServiceUnavailable", ErrorClass::Unanswered, Refused::None),
    ("Unavailable", ErrorClass::Unanswered, Refused::None),
];

/// Returns the class of an error, and the offerings that it refuses.
pub(super) fn classify(error: &CallError) -> (ErrorClass, Refused) {
    let known = error.code().and_then(|code| CODES.iter().find(|(known, ..)| *known == code));
    if let Some((_, class, refused)) = known {
        return (*class, *refused);
    }
    let class = match &error.failure {
        Failure::Refused { .. } => ErrorClass::Invalid,
        Failure::NotSent(_) => ErrorClass::Transient,
        Failure::Failed { .. }
        | Failure::Unanswered(_)
        | Failure::TooSlow(_)
        | Failure::Incomplete(_) => ErrorClass::Unanswered,
    };
    (class, Refused::None)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::*;

    fn class(failure: Failure) -> (ErrorClass, Refused) {
        classify(&CallError { operation: "RunInstances", failure })
    }

    fn refused(code: &str) -> Failure {
        Failure::Refused { code: code.into(), message: String::new() }
    }

    fn failed(code: &str) -> Failure {
        Failure::Failed { code: code.into(), message: String::new() }
    }

    #[test]
    fn every_code_has_its_class_whatever_the_http_status() {
        for (code, of, offerings) in CODES {
            assert_eq!(class(refused(code)), (of, offerings), "{code}");
            assert_eq!(class(failed(code)), (of, offerings), "{code}");
        }
        let names: BTreeSet<_> = CODES.iter().map(|(code, ..)| code).collect();
        assert_eq!(names.len(), CODES.len(), "a code has two rows");
    }

    /// Verifies A29.
    #[test]
    fn documented_table_is_that_of_the_code() {
        let rows: String = CODES
            .iter()
            .map(|(code, class, refused)| {
                let refused = match refused {
                    Refused::None => "",
                    Refused::Offering => "the offering",
                    Refused::Zone => "its zone",
                    Refused::Market => "its market",
                };
                format!("| `{code}` | {class:?} | {refused} |\n")
            })
            .collect();
        let document = include_str!("../../../../../docs/ec2.md");
        assert!(document.contains(&rows), "docs/ec2.md lacks the table:\n{rows}");
    }

    #[test]
    fn only_capacity_refuses_offerings() {
        for (code, of, offerings) in CODES {
            assert_eq!(of == ErrorClass::Capacity, offerings != Refused::None, "{code}");
        }
    }

    #[test]
    fn unknown_codes_and_lost_answers_are_classed_by_what_may_have_happened() {
        assert_eq!(class(refused("Unheard")).0, ErrorClass::Invalid);
        assert_eq!(class(failed("Unheard")).0, ErrorClass::Unanswered);
        assert_eq!(class(Failure::NotSent("refused".into())).0, ErrorClass::Transient);
        for unknown in [
            Failure::Unanswered("reset".into()),
            Failure::TooSlow(Duration::from_secs(1)),
            Failure::Incomplete("instance"),
        ] {
            assert_eq!(class(unknown).0, ErrorClass::Unanswered);
        }
    }
}
