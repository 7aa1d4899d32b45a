// Prints what Kubernetes estimates of each rule of the CustomResourceDefinition on its standard input, and its limits.
//
// It walks the schema as ValidateCustomResourceDefinitionOpenAPISchema of apiextensions-apiserver does, with the
// same contexts, so that the sum is the one that an API server compares with its limit. That function itself
// returns errors alone. Rules are compiled with what an API server of 1.30 has, the oldest one that is supported.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

type rule struct {
	Path string `json:"path"`
	Rule string `json:"rule"`
	Cost uint64 `json:"cost"`
}

type answer struct {
	Rules        []rule `json:"rules"`
	Total        uint64 `json:"total"`
	LimitOfAll   uint64 `json:"limitOfAll"`
	LimitOfARule uint64 `json:"limitOfARule"`
}

type walker struct {
	rules       []rule
	environment *environment.EnvSet
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "celcost:", err)
		os.Exit(1)
	}
}

func run() error {
	var definition v1.CustomResourceDefinition
	if err := json.NewDecoder(os.Stdin).Decode(&definition); err != nil {
		return err
	}
	var total uint64
	walker := walker{
		rules:       []rule{},
		environment: environment.MustBaseEnvSet(version.MajorMinor(1, 30), true),
	}
	for _, one := range definition.Spec.Versions {
		schema := &apiextensions.JSONSchemaProps{}
		if err := v1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(one.Schema.OpenAPIV3Schema, schema, nil); err != nil {
			return err
		}
		context := validation.RootCELContext(schema)
		if err := walker.walk(schema, nil, context); err != nil {
			return err
		}
		// Each version has a budget of its own: the largest one is what counts.
		total = max(total, context.TotalCost.Total)
	}
	return json.NewEncoder(os.Stdout).Encode(answer{
		walker.rules, total, validation.StaticEstimatedCRDCostLimit, validation.StaticEstimatedCostLimit,
	})
}

func (w *walker) walk(schema *apiextensions.JSONSchemaProps, path *field.Path, context *validation.CELSchemaContext) error {
	if schema.AdditionalProperties != nil && schema.AdditionalProperties.Schema != nil {
		child := schema.AdditionalProperties.Schema
		if err := w.walk(child, path.Child("*"), context.ChildAdditionalPropertiesContext(child)); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
		child := schema.Properties[name]
		if err := w.walk(&child, path.Child(name), context.ChildPropertyContext(&child, name)); err != nil {
			return err
		}
	}
	if schema.Items != nil && schema.Items.Schema != nil {
		child := schema.Items.Schema
		if err := w.walk(child, path.Child("[]"), context.ChildItemsContext(child)); err != nil {
			return err
		}
	}
	if len(schema.XValidations) == 0 {
		return nil
	}
	info, err := context.TypeInfo()
	if err != nil || info == nil {
		return errors.Join(fmt.Errorf("%s: no type information", path), err)
	}
	found, err := cel.Compile(info.Schema, info.DeclType, celconfig.PerCallLimit, w.environment, cel.NewExpressionsEnvLoader())
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for number, one := range found {
		if one.Error != nil {
			return fmt.Errorf("%s: rule %d: %s", path, number, one.Error.Detail)
		}
		if one.MessageExpressionError != nil {
			return fmt.Errorf("%s: message of rule %d: %s", path, number, one.MessageExpressionError.Detail)
		}
		times := one.MaxCardinality
		if context.MaxCardinality != nil {
			times = *context.MaxCardinality
		}
		text := schema.XValidations[number].Rule
		w.observe(context, path, text, multiply(one.MaxCost, times))
		if one.MessageExpression != nil {
			w.observe(context, path, schema.XValidations[number].MessageExpression, one.MessageExpressionMaxCost)
		}
	}
	return nil
}

func (w *walker) observe(context *validation.CELSchemaContext, path *field.Path, text string, cost uint64) {
	context.TotalCost.ObserveExpressionCost(path, cost)
	where := ""
	if path != nil {
		where = path.String()
	}
	w.rules = append(w.rules, rule{where, text, cost})
}

// multiply holds the largest number instead of passing it, as Kubernetes does.
func multiply(cost, times uint64) uint64 {
	if cost != 0 && math.MaxUint64/cost < times {
		return math.MaxUint64
	}
	return cost * times
}
